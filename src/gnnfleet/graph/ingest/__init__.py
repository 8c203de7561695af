"""Everything that becomes a graph: raw tables out of core, and the formats of other tools in memory."""
