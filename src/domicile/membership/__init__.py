"""Is this process a member? A leased record in the store, kept, watched and given back."""
