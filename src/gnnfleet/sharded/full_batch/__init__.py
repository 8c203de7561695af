"""Full-batch operations on a graph whose partitions lie on different ranks."""
