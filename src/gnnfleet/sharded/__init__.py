"""A graph spread over ranks: views of it, and what exact training and inference on it share."""
