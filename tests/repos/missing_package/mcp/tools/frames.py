"""Tools for data frames."""

import no_such_package_anywhere.core as frames
