"""Layers, models and heads. A layer knows a view, never a rank; a model is an ordered list of layers."""
