"""Independent trainers on randomised parts, weights averaged on a clock."""
