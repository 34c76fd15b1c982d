package snapshot

import (
	"encoding/json"
	"reflect"
	"testing"
)

// parsers pairs each fast parser with what encoding/json makes of the same text.
var parsers = map[string]func([]byte) (fast, slow any, ok bool, err error){
	"head": func(b []byte) (any, any, bool, error) {
		fast, ok := parseHead(b)
		slow := new(Head)
		return fast, slow, ok, json.Unmarshal(b, slow)
	},
	"page": func(b []byte) (any, any, bool, error) {
		fast, ok := parsePage(b)
		slow := new(Page)
		return fast, slow, ok, json.Unmarshal(b, slow)
	},
	"index page": func(b []byte) (any, any, bool, error) {
		fast, ok := parseIndexPage(b)
		slow := new(IndexPage)
		return fast, slow, ok, json.Unmarshal(b, slow)
	},
}

var written = map[string][]string{
	"head": {
		`{"v":1,"format":3,"fold":1,"session":"s \"1\"","seq":-1,"streamSeq":0,"digest":"","chain":"ab","time":0,"logBytes":0,"replaceGeneration":0,"nodeCount":0,"index":[],"pages":[],"tail":[],"nextPage":0,"lifecycle":{"turn":null,"step":null,"calls":[],"agents":{}}}`,
		`{"v":1,"format":4,"fold":2,"session":"s","seq":66,"streamSeq":57,"digest":"ab","chain":"cd","time":1796057896365,"logBytes":191217,"replaceGeneration":3,"nodeCount":61,"headType":"user/message","index":[3,17],"pages":[{"n":0,"count":4,"seqs":[[0,2],7],"bytes":64859},{"n":1,"count":1,"seqs":[21],"bytes":8}],"tail":[{"seq":59,"at":55,"type":"user/message","size":3089,"message":{"id":"\u00e9","n":[1.10,-2e5,true,null]}},{"seq":66,"at":57,"type":"tool/result","size":206,"fp":"fe43","message":"m"},{"seq":67,"at":57,"type":"assistant/message","size":9}],"nextPage":2,"lifecycle":{"turn":1,"step":1,"calls":[{"id":"c1","seq":64,"unasked":true}],"answered":[{"id":"c2"}],"agents":{"a":"running"}},"writer":{"id":"w","epoch":1,"seq":60}}`,
	},
	"page":       {`{"v":1,"nodes":[{"seq":0,"at":50,"type":"system/message","size":12,"message":{}},{"seq":1,"at":50,"type":"developer/message","size":0}]}`, `{"v":1,"nodes":[]}`},
	"index page": {`{"v":1,"pages":[{"n":0,"count":1,"seqs":[0],"bytes":66088},{"n":1,"count":3,"seqs":[1,[5,6]],"bytes":1}]}`, `{"v":1,"pages":[]}`},
}

// What is written is read without encoding/json, and comes to the same.
func TestWhatIsWrittenIsReadAsWritten(t *testing.T) {
	t.Parallel()
	for kind, texts := range written {
		for _, text := range texts {
			fast, slow, ok, err := parsers[kind]([]byte(text))
			if err != nil || !ok || !reflect.DeepEqual(fast, slow) {
				t.Errorf("%s %s: read: %t, %v\nfast %+v\nslow %+v", kind, text, ok, err, fast, slow)
			}
		}
	}
}

// FuzzParseIsStrict: whatever the fast parsers accept, encoding/json reads too, with the same result.
func FuzzParseIsStrict(f *testing.F) {
	for kind, texts := range written {
		for _, text := range texts {
			f.Add(kind, []byte(text))
			for i := 0; i < len(text); i += 3 {
				f.Add(kind, []byte(text[:i]+text[i+1:]))
				f.Add(kind, []byte(text[:i]+"0"+text[i:]))
				f.Add(kind, []byte(text[:i]+`"`+text[i+1:]))
			}
		}
	}
	f.Fuzz(func(t *testing.T, kind string, b []byte) {
		parse, ok := parsers[kind]
		if !ok {
			return
		}
		fast, slow, ok, err := parse(b)
		if ok && (err != nil || !reflect.DeepEqual(fast, slow)) {
			t.Errorf("%s %s: encoding/json: %v\nfast %+v\nslow %+v", kind, b, err, fast, slow)
		}
	})
}
