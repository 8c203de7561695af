"""Learning tasks: node classification, link prediction, events; independent of how a graph is distributed."""
