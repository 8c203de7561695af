"""Queries to trained runs: metrics, predictions and scores."""
