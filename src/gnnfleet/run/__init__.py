"""From a command or a call to a finished run."""
