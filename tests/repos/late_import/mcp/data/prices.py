PRICES = {"apple": 3}
