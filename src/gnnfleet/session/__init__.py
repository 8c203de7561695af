"""Sessions: from options to a finished run."""
