"""Graphs from what users have: tables, arrays, files and objects of other libraries."""
