"""Growing, shrinking and surviving."""
