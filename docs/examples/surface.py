import asyncio, json, sys, nats
async def main(token, url="nats://127.0.0.1:4222"):
    nc = await nats.connect(url)
    serves = json.loads((await (await nc.jetstream().key_value("GENERATIONS")).get("surfaces")).value)["current"]["bucket"]
    kv = await nc.jetstream().key_value(serves)
    async def get(key): return json.loads((await kv.get(key)).value)  # no such key: read the head again
    head = await get(token)
    entries = [e for n in head["index"] for e in (await get(f"{token}.i{n}"))["pages"]] + head["pages"]
    nodes = [n for e in entries for n in (await get(f"{token}.{e['n']}"))["nodes"]] + head["tail"]
    for n in nodes:
        if "message" in n: print(json.dumps(n["message"], ensure_ascii=False))
    await nc.close()
asyncio.run(main(*sys.argv[1:]))
