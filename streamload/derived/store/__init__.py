"""Rows, stored: sealed → queued → in a table, in memory or in a mapping; what lists and checks them.

It knows neither what proves a row nor what calls a module.
"""
