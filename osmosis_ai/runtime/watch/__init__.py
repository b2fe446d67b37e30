"""Watch mode: re-run what each save makes stale."""
