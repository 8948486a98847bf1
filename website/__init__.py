"""What `make docs` does: the generated parts of the documents, and the site made of them."""
