"""Sampled training on a partitioned graph: several mini-batches sampled and fetched in one relay (BatchGNN)."""
