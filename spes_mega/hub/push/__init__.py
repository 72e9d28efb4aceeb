"""A push on its way into the open round: received, checked, committed."""
