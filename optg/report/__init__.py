"""A page that shows runs to others: tables, figures, commands, in one HTML file."""
