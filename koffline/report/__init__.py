"""What people look at: tables, plots and the HTML page."""
