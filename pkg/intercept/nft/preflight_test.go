package nft

const preflightEnv = "KASWAY_NFT_TEST_PREFLIGHT"

func preflightChild() {}
