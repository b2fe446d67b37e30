import tools.units
from server_setup import mcp
