"""Planning: estimates, profiles and trial runs from which a strategy is recommended."""
