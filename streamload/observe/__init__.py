"""Observation of a run: figures, verdict, alerts, the published page, recordings, reports, traces, /metrics.

The kernel counts (metrics/); what follows is here, behind the `Observer` of loader/observer.py.
"""
