"""What moving KV cost, as figures, bars, pages and plots."""
