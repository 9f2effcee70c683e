"""A run on more than one machine: calls go to the workers of a Dask cluster instead of to processes here."""
