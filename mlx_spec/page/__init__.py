"""What the page shows and keeps, apart from its widgets. Imports no MLX before a pair is loaded."""
