"""Spark's daemon, whose workers look for modules in no archive that is on their path anyway.

Before each task a worker reads anew the list of what is in each archive on its path, in Python:
one of them is Spark's own jar, with thousands of files, and takes much longer than a task of a
test. What is in `pyspark.zip` is installed, too.
"""

import sys


def main() -> None:
    """Run the daemon without them; those that a query brings are added by its tasks."""
    for place in [each for each in sys.path if each.endswith((".zip", ".jar"))]:
        sys.path.remove(place)
        sys.path_importer_cache.pop(place, None)
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
