"""Views: the graph as layers see it, whole or a block of it, in one process."""
