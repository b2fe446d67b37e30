from server import mcp
from tools import *

if __name__ == "__main__":
    mcp.run(transport="http", host="127.0.0.1", port=8080)
