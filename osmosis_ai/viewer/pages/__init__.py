"""The pages: each reads the store and passes plain data to its template.

The functions are thread-safe, and raise StoreError if something doesn't exist.
"""
