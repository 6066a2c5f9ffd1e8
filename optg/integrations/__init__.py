"""Callbacks for other packages' trainers. Import the module of your trainer; each needs its own package only."""
