"""What everything above shares: dtypes, trees, sharding."""
