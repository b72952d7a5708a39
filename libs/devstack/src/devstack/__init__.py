"""The whole platform on one machine, for development, demonstrations and tests by hand. A tool: nothing imports it."""
