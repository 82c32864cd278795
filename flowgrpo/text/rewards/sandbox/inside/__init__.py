"""Programs that run within a boundary: `main` of a folder with a job. Only the standard library, relative imports."""
