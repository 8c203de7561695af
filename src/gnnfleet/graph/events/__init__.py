"""Streams of timed events and their negative samples."""
