"""What each page shows: read from the store, and made into plain data for its template.

Any thread may call them; they raise StoreError if something isn't there.
"""
