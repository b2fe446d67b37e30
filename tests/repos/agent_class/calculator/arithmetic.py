def add(a, b):
    return a + b


TOOLS = {"add": add}
