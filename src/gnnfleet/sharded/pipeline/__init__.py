"""Views and exchanges of pipeline stages that work through chunks of nodes."""
