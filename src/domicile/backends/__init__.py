"""From URLs to stores, journals, transports and health ports."""
