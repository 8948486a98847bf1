"""What `make docs` and `make pages` do: the generated parts of the documents, and the site made of them."""
