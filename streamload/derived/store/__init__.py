"""Rows, stored: sealed → queued → in a database, in memory or in a mapping; what lists and checks them.

It knows neither what proves a row nor what calls a module.
"""
