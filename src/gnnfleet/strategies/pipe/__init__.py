"""Layers in stages, chunks of nodes streamed through them (GNNPipe), hybrid with graph parallelism."""
