"""Code and links of README.md and of the documentation site's pages."""
