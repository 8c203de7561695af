"""Ways into a store: tables (out of core, through DuckDB) and objects other tools hold in memory or on disk."""
