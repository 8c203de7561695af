"""torch_geometric modules on views, unchanged."""
