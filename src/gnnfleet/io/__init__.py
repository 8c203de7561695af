"""Files on disk: directories of arrays under a checksummed manifest, and files replaced in one step."""
