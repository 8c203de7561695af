"""Views: the interface between layers and a graph, and its implementation in one process."""
