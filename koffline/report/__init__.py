"""Output for people: tables, plots and the HTML page."""
