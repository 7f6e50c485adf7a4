"""Observation of a run: figures, verdict, alerts, the published page, recordings, reports, traces, /metrics.

The kernel counts (metrics/); what follows is here, by a `RunObserver`, which the loader calls.
"""
