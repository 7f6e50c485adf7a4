"""Calls of cached modules: from inputs and keys to rows, stored or computed."""
