"""What people and machines read: progress, tables, records. A leaf: it knows numbers and words, no graphs."""
