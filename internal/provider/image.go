package provider

import (
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"

	"palimpsest/internal/events"
)

// picture is what an image block says about its image.
type picture struct {
	media string // such as image/png
	data  string // base64
	url   string // http or https
	id    string // of an attachment that is kept elsewhere
}

// mediaTypes are those that both targets take.
var mediaTypes = []string{"image/jpeg", "image/png", "image/gif", "image/webp"}

// readImage finds the image in a block: data with a media type, or a URL, in the block or in
// one of the members that are in use for it. why says what is wrong, "" for nothing.
func readImage(raw []byte) (p picture, why string) {
	for _, holder := range [][]byte{raw, events.Get(raw, "source"), events.Get(raw, "attachment"), events.Get(raw, "image_url"), events.Get(raw, "image")} {
		if isText(holder) && p.url == "" {
			p.url, _ = events.Text(holder)
		}
		first(&p.url, holder, "url")
		first(&p.data, holder, "data")
		first(&p.id, holder, "attachmentId")
		first(&p.media, holder, "mediaType", "media_type", "mimeType", "mime_type")
	}
	if head, data, ok := strings.Cut(p.url, ","); ok && strings.HasPrefix(head, "data:") {
		media, coded := strings.CutSuffix(head, ";base64")
		if !coded {
			return p, "its data URL is not base64"
		}
		p.media, p.data, p.url = media[len("data:"):], data, ""
	}
	switch {
	case p.data != "" && !slices.Contains(mediaTypes, p.media):
		return p, "its media type is none of " + strings.Join(mediaTypes, ", ")
	case p.data != "" && !isBase64(p.data):
		return p, "its data is not base64"
	case p.data != "":
		p.url = ""
	case p.url != "" && !webURL(p.url):
		return p, "its URL is not one of http or https"
	case p.url == "":
		return p, "the log holds neither its data nor a URL"
	}
	return p, ""
}

// first sets s, unless it is set, to the first of the members that is a string.
func first(s *string, object []byte, members ...string) {
	for _, name := range members {
		if *s == "" {
			*s, _ = events.Text(events.Get(object, name))
		}
	}
}

// refusedBy says why a target does not take the image, "" when it does.
func (p picture) refusedBy(t Target) string {
	if t == Anthropic && p.data == "" && !strings.HasPrefix(p.url, "https:") {
		return "the API takes https URLs only"
	}
	return ""
}

func (p picture) render(t Target) []byte {
	switch {
	case t == OpenAI && p.data != "":
		return []byte(`{"type":"image_url","image_url":{"url":"data:` + p.media + `;base64,` + p.data + `"}}`)
	case t == OpenAI:
		return append(append([]byte(`{"type":"image_url","image_url":{"url":`), quote(p.url)...), "}}"...)
	case p.data != "":
		return []byte(`{"type":"image","source":{"type":"base64","media_type":"` + p.media + `","data":"` + p.data + `"}}`)
	}
	return append(append([]byte(`{"type":"image","source":{"type":"url","url":`), quote(p.url)...), "}}"...)
}

// describe says which image it is, in brackets.
func (p picture) describe() string {
	var is []string
	if p.media != "" {
		is = append(is, clip(p.media))
	}
	if p.id != "" {
		is = append(is, clip(p.id))
	}
	if is == nil {
		return ""
	}
	return " (" + strings.Join(is, ", ") + ")"
}

// isBase64 reports whether s is base64 in the standard alphabet, padded, and not empty.
func isBase64(s string) bool {
	body := strings.TrimRight(s, "=")
	if body == "" || len(s)%4 != 0 || len(s)-len(body) > 2 {
		return false
	}
	for i := range len(body) {
		if c := body[i]; !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '+' || c == '/') {
			return false
		}
	}
	return true
}

// webURL reports whether s is an absolute http or https URL.
func webURL(s string) bool {
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
		return false
	}
	u, err := url.Parse(s)
	return err == nil && u.Host != "" && (strings.HasPrefix(s, "https://") || strings.HasPrefix(s, "http://"))
}
