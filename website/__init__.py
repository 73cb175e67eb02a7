"""Build the documentation site: MkDocs calls `website.hooks`, and `mkdocs.yml` has the rest."""
